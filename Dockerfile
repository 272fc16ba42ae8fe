# imagenet-fast on NVIDIA's PyTorch image, with the torch, torchvision and DALI that are in it.
#
#   docker build -t imagenet-fast .
#   docker run --gpus all --ipc=host -v /path/to/imagenet:/data:ro -v "$PWD/runs:/runs" \
#       imagenet-fast train --recipe resnet50-8gpu --data /data --out /runs/first
FROM nvcr.io/nvidia/pytorch:26.05-py3

COPY . /opt/imagenet-fast
WORKDIR /opt/imagenet-fast
RUN python scripts/light_requirements.py > /tmp/light.txt \
    && pip install --no-cache-dir -r /tmp/light.txt \
    && pip install --no-cache-dir --no-deps .

RUN useradd --create-home trainer && mkdir /runs && chown trainer /runs
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["imagenet-fast"]
CMD ["--help"]
