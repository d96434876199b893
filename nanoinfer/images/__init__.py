"""Images in prompts: from what a user gives to token ids and tensors.

`sources.py` reads a picture, `processor.py` runs the model's own processor on it, `image_reader.py` does both for whole
prompts in threads, and `image_engine.py` runs the requests. A picture is what a user gives; an image is its place in a
prompt.
"""
