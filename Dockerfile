# imagenet-fast on NVIDIA's PyTorch image, with the torch, torchvision and DALI that are in it. It runs as you, in the
# directory you are in: runs/ appears there and is yours.
#
#   docker build -t imagenet-fast .
#   docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD:/here" -v /path/to/imagenet:/data:ro \
#       imagenet-fast train --recipe resnet50-8gpu --data /data
FROM nvcr.io/nvidia/pytorch:26.05-py3

COPY . /opt/imagenet-fast
WORKDIR /opt/imagenet-fast
# The image pins hundreds of packages by a constraints file, older than what we need of some. What it has and we can
# use stays as it is all the same: pip upgrades only what is too old. For that reason constraints.txt is not used here.
# An OpenCV of the image's own has files that ours would lie among. By its version the image's torch is a pre-release, so
# pip would consider it too old and install a second one: it is told of neither torch nor DALI.
RUN pip uninstall --yes opencv opencv-python opencv-python-headless \
    && rm -rf "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cv2" \
    && python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["demo"], sep="\n")' \
        | grep -vE "^(torch|torchvision|nvidia-dali-cuda130)[<>=]" > /tmp/light.txt \
    && PIP_CONSTRAINT= pip install --no-cache-dir --upgrade-strategy only-if-needed -r /tmp/light.txt \
    && PIP_CONSTRAINT= pip install --no-cache-dir --no-deps . \
    && imagenet-fast recipes > /tmp/recipes.txt \
    && python -c 'import cv2'

# A user whom the image does not know has neither home nor name, by which our data sets, matplotlib and torch keep caches.
ENV HOME=/home/anybody \
    USER=anybody \
    TORCHINDUCTOR_CACHE_DIR=/home/anybody/.cache/torchinductor
RUN mkdir --mode=1777 /home/anybody /here

USER 1000:1000
WORKDIR /here
ENTRYPOINT ["imagenet-fast"]
CMD ["--help"]
