"""What every room imports, and what imports none: files, command lines, mistakes, progress, seeds, names of wings."""
