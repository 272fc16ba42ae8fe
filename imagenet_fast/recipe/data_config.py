"""The ``[data]`` table of a recipe: the source of the images, how they are read, and their augmentation."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from imagenet_fast.recipe.base import Table


class DaliDecoding(Table):
    """Settings of DALI's JPEG decoder on a GPU; ignored on a CPU."""

    hw_decoder_load: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Share of the JPEGs, from 0 to 1, decoded by the GPU's hardware decoder, if it has one."""
    fancy_upsampling: bool = True
    """Whether to upsample chroma as libjpeg and the CPU loaders do.

    If not, as in NVIDIA's submissions to MLPerf, the GPU has less to do, and colours at edges differ.
    """
    device_padding_mb: NonNegativeInt = 16
    """GPU memory, in MiB, that nvJPEG reserves per thread.

    A larger image that needs more would otherwise stall the other threads while memory is allocated.
    """
    host_padding_mb: NonNegativeInt = 8
    """Pinned host memory, in MiB, that nvJPEG reserves; twice per thread."""
    preallocate_width: NonNegativeInt = 0
    """Width, in pixels, of the largest image, for which the hardware decoder allocates memory at once; 0: no hint."""
    preallocate_height: NonNegativeInt = 0
    """Height, in pixels, of that image; 0: no hint."""


class ImageData(Table):
    """Images on disk, in folders ``train/<class>/*`` and ``val/<class>/*`` or in shards."""

    dataset: Literal["imagenet", "cifar10", "digits"]
    """Data set to use when ``--data`` is not given."""
    loader: Literal["dali", "threads"]
    """Loader: ``dali`` (NVIDIA DALI), or ``threads`` of the CPU; both read folders, shards and stored pixels."""
    image_size: PositiveInt
    """Side, in pixels, of the square crops that the network sees."""
    resize: PositiveInt
    """Length, in pixels, of a validation image's shorter side before the centre crop.

    At least ``image_size`` and ``eval_size``. The crop has ``eval_size`` pixels a side.
    """
    sizes: tuple[tuple[PositiveFloat, PositiveInt], ...] = ()
    """Progressive resizing: pairs [first epoch, side in pixels] for training images.

    [[1, 128], [6, 192]] means 128 pixels from epoch 1 on and 192 from epoch 6 on. Epochs count from 1 and must rise;
    6.5 is the middle of epoch 6. Before the first pair, ``image_size`` applies.
    """
    size_multiple: NonNegativeInt = 0
    """If not 0, sides grow linearly from one pair of ``sizes`` to the next, step by step, in multiples of this.

    All sides in ``sizes`` must be multiples of it.
    """
    eval_size: NonNegativeInt = 0
    """Side of validation images, in pixels; 0: ``image_size``."""
    augment: bool = True
    """Whether to crop at random, and flip, training images. If not, they are treated as validation images are."""
    crop: Literal["resized", "window", "padded"] = "resized"
    """Random crop in training.

    ``resized``: a window that covers a share of ``crop_area`` and has one of several aspect ratios. ``window``:
    AlexNet's crop, a square of ``image_size`` from the central square of an image whose shorter side is ``resize``.
    ``padded``: CIFAR's crop, a square of ``image_size`` from anywhere in an image whose shorter side is ``resize``,
    with ``crop_padding`` pixels more on each side; for ``loader`` = ``threads``.
    """
    crop_padding: NonNegativeInt = 0
    """Pixels by which ``crop`` = ``padded`` enlarges each side of an image, with its mirror image; below ``resize``.

    The outermost pixels are not repeated. Unused with other crops.
    """
    crop_area: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    """Smallest and largest share of the image's area that a random crop covers.

    Two numbers above 0 and at most 1, the smaller first. Only used with ``crop`` = ``resized``.
    """
    flip: bool | Literal["alternate"] = True
    """Whether to mirror half of the training images, chosen at random in each epoch.

    ``alternate``: chosen at random in the first epoch; in each later one the other half is mirrored, so that two epochs
    show both sides of an image (Jordan, arXiv 2404.00498).
    """
    mixup: NonNegativeFloat = 0.0
    """Alpha of the Beta distribution for mixup shares, which blend training images; 0: no mixup."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of the Beta distribution for cutmix, which pastes a window of another image into each; 0: no cutmix.

    With ``mixup`` too, each micro-batch is mixed in one of the two ways.
    """
    resident: Literal["auto"] | bool = "auto"
    """Whether to keep all images of a split on the GPU, decoded; each must be sound, with at most 512 pixels a side.

    ``auto``: keep them there if they are so, and take at most 4 GiB and a quarter of its free memory.
    """
    workers: NonNegativeInt = 0
    """Decoding threads per rank, at most the cores that the rank may use; 0: as many as those cores."""
    prefetch: PositiveInt = 2
    """Batches read ahead of the one in training; at least 1."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """Treatment of an image that cannot be decoded.

    ``fail``: end the run with an error that names the image. ``skip``: name it in a warning. In training another image
    replaces it; in an evaluation it counts as wrong.
    """
    dali: DaliDecoding = DaliDecoding()
    """Settings of DALI's decoder, for ``loader`` = ``dali`` on a GPU."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of each channel, red, green, blue, in units of 1 for white; subtracted from each pixel."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, by which pixels are divided; each above 0."""

    @property
    def evaluated_size(self) -> int:
        """Side, in pixels, of a validation image as the network sees it."""
        return self.eval_size or self.image_size

    @property
    def training_sizes(self) -> set[int]:
        """All sides, in pixels, that training images can have."""
        sizes = [size for _, size in self.sizes]
        found = {self.image_size, *sizes}
        if self.size_multiple:
            for one, next_one in pairwise(sizes):
                found |= {*range(min(one, next_one), max(one, next_one), self.size_multiple)}
        return found

    @model_validator(mode="after")
    def _crop_fits(self) -> ImageData:
        """Check that crop sizes fit, epochs of ``sizes`` rise and ``crop_area`` is a valid range."""
        for key, size in (("image_size", self.image_size), ("eval_size", self.eval_size)):
            if self.resize < size:
                raise ValueError(f"resize ({self.resize}) must be at least {key} ({size})")
        epochs = [epoch for epoch, _ in self.sizes]
        if epochs != sorted(set(epochs)):
            listed = ", ".join(f"{epoch:g}" for epoch in epochs)
            raise ValueError(f"sizes must name rising epochs, such as [[1, 128], [6, 192]], not [{listed}]")
        if uneven := [size for _, size in self.sizes if self.size_multiple and size % self.size_multiple]:
            raise ValueError(f"sizes must be multiples of size_multiple ({self.size_multiple}), and {uneven[0]} is not")
        if not self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ValueError("crop_area must be two rising shares of the area, such as [0.08, 1.0]")
        smallest = self.resize * min(self.training_sizes) // self.image_size
        if self.crop == "padded" and self.loader == "dali":
            raise ValueError("crop 'padded' is for loader 'threads'; --set data.loader=threads")
        if self.crop == "padded" and self.crop_padding >= smallest:
            raise ValueError(
                f"crop_padding ({self.crop_padding}) must be less than an image's shorter side of {smallest} pixels, "
                "which it mirrors"
            )
        return self


class SyntheticData(Table):
    """Random images, made once, to take storage and decoding out of a measurement.

    Their bytes are uniformly distributed.
    """

    sizes: ClassVar[tuple[tuple[float, int], ...]] = ()
    """Progressive resizing: none."""
    mean: ClassVar[tuple[float, float, float]] = (0.5, 0.5, 0.5)
    """Mean of each channel of uniform bytes."""
    std: ClassVar[tuple[float, float, float]] = (0.28981, 0.28981, 0.28981)
    """Standard deviation of each channel of uniform bytes."""

    loader: Literal["synthetic"]
    image_size: PositiveInt
    """Side of the images, in pixels."""
    train_images: PositiveInt
    """Number of training images."""
    val_images: PositiveInt
    """Number of validation images."""
    classes: PositiveInt
    """Number of classes."""

    @property
    def training_sizes(self) -> set[int]:
        """The side, in pixels, of training images."""
        return {self.image_size}

    @property
    def evaluated_size(self) -> int:
        """Side, in pixels, of a validation image as the network sees it."""
        return self.image_size


Data = Annotated[ImageData | SyntheticData, Field(discriminator="loader")]
