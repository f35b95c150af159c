"""Functions in files: written today, loaded and differentiated years later."""
