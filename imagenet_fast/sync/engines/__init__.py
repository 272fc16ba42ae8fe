"""The engines: each is a short declaration, except ``sparse`` and ``auto``, which do more than a scheduler."""
