"""What a person sees, and the files that are written."""
