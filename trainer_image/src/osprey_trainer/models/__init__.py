"""Forward passes and weight names."""
