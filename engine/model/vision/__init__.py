"""Models that see: what their files say of images, and the tower that looks at them."""
