"""Texts become token ids, and the one reader of the files that hold them."""
