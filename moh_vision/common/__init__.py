"""Files, command lines, mistakes, progress, seeds, names of wings. Every room imports this one; it imports no other."""
