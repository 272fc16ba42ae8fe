"""Images in files of many, and the index by which any of them is found at once."""
