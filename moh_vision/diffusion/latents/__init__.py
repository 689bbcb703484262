"""Latents of images: VAEs (vae.py), latents on disk (stored.py), and the command that writes them (write_latents.py)."""
