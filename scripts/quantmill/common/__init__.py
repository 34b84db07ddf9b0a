"""The start, errors and files of programs, and properties of all artifacts and models."""
