"""Search a library of images with an exported CLIP. Never imports torch."""
