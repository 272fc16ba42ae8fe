"""The engines, each a declaration of a few lines; ``sparse`` and ``auto`` do more than a scheduler does."""
