"""Latents of images: the VAE (vae.py), what is stored (stored.py), and the command that stores it (write_latents.py)."""
