"""The images a recipe can name: where they come from, how they are read, and what is done to them in training."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from imagenet_fast.recipe.base import Table


class DaliDecoding(Table):
    """How DALI decodes on a GPU; on a CPU nothing of it is read. Its cache of decoded images is not here: it goes by
    the names of files, which DALI is not told, and keeps images whole."""

    hw_decoder_load: Annotated[float, Field(ge=0, le=1)] = 0.65
    """The share of JPEGs that goes to the GPU's own decoder, where it has one."""
    device_padding_mb: NonNegativeInt = 16
    """Memory on the GPU that nvJPEG reserves for a thread, so that a larger image does not stop the others."""
    host_padding_mb: NonNegativeInt = 8
    """The same in pinned memory of the host, twice a thread."""
    preallocate_width: NonNegativeInt = 0
    """Of the largest image that the GPU's own decoder has memory for at once; 0: it finds out."""
    preallocate_height: NonNegativeInt = 0


class ImageData(Table):
    """Images on disk, in folders ``train/<class>/*`` and ``val/<class>/*`` or in shards."""

    dataset: Literal["imagenet", "cifar10", "digits"]
    """Where the images come from when no ``--data`` is given."""
    loader: Literal["dali", "folder"]
    image_size: PositiveInt
    resize: PositiveInt
    """Validation: the shorter side, before the centre crop of ``image_size``."""
    sizes: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """Of training images, as [[1, 128], [6, 192]]: from epoch 1 on they are 128 pixels wide, from epoch 6 on 192;
    before the first of these ``image_size``."""
    eval_size: NonNegativeInt = 0
    """Of validation images; 0: ``image_size``."""
    augment: bool = True
    """Random crop and flip in training; off, training images are treated as validation images are."""
    crop: Literal["resized", "window"] = "resized"
    """``resized``: windows of ``crop_area`` and of several aspect ratios; ``window``: AlexNet's own, square ones of
    ``image_size`` from the middle of an image whose shorter side is ``resize``."""
    crop_area: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    """Smallest and largest share of the area that a random crop covers."""
    flip: bool = True
    mixup: NonNegativeFloat = 0.0
    """Training images are laid over one another, by shares from a Beta distribution of this alpha; 0: never."""
    cutmix: NonNegativeFloat = 0.0
    """A window of another image is set into each, of a share from such a distribution; with ``mixup`` too, each
    micro-batch is mixed in one way or the other."""
    workers: NonNegativeInt = 0
    """Decoding threads a rank, but no more than the cores that it may use; 0: as many as these."""
    prefetch: PositiveInt = 2
    """Batches that are read ahead of the one that is trained on."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """What becomes of an image that cannot be decoded: the run ends and names it, or it is named and another stands in
    for it in training, while in an evaluation it counts as wrong."""
    cache: str = ""
    """A directory on a disk of each node, for decoded images of which later epochs, and later runs, make their crops.
    Empty: none."""
    cache_side: NonNegativeInt = Field(default_factory=lambda given: 256 if given.get("cache") else 0)
    """Images with a longer shorter side are shrunk to it before anything else, cached or not, so that a run may go on
    where there is no cache. 0: they are not."""
    dali: DaliDecoding = DaliDecoding()
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)

    @property
    def evaluated_size(self) -> int:
        """In pixels, of each side of a validation image as a network sees it."""
        return self.eval_size or self.image_size

    @model_validator(mode="after")
    def _crop_fits(self) -> ImageData:
        for key, size in (("image_size", self.image_size), ("eval_size", self.eval_size)):
            if self.resize < size:
                raise ValueError(f"resize ({self.resize}) must be at least {key} ({size})")
        epochs = [epoch for epoch, _ in self.sizes]
        if epochs != sorted(set(epochs)):
            raise ValueError(f"sizes must name rising epochs, such as [[1, 128], [6, 192]], not {epochs}")
        if not self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ValueError("crop_area must be two rising shares of the area, such as [0.08, 1.0]")
        return self

    @model_validator(mode="after")
    def _cache_serves(self) -> ImageData:
        if (self.cache or self.cache_side) and self.loader != "folder":
            raise ValueError(
                "cache and cache_side are for pixels, and dali takes encoded images; --set data.loader=folder, or "
                "leave them out"
            )
        if 0 < self.cache_side < self.resize:
            raise ValueError(
                f"cache_side ({self.cache_side}) must be at least resize ({self.resize}), or 0 for whole images; "
                f"--set data.cache_side={self.resize}"
            )
        return self


class SyntheticData(Table):
    """Random images made once, to take storage and decoding out of a measurement. Their bytes are uniform."""

    mean: ClassVar[tuple[float, float, float]] = (0.5, 0.5, 0.5)
    std: ClassVar[tuple[float, float, float]] = (0.28981, 0.28981, 0.28981)

    loader: Literal["synthetic"]
    image_size: PositiveInt
    train_images: PositiveInt
    val_images: PositiveInt
    classes: PositiveInt

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return ()

    @property
    def evaluated_size(self) -> int:
        return self.image_size


Data = Annotated[ImageData | SyntheticData, Field(discriminator="loader")]
