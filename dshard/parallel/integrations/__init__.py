"""Models, names and habits of other libraries, of which no other file of `dshard.parallel` knows.

`torch_styles` has torch's parallel styles; `huggingface` makes parallelized models of transformers and peft what those
libraries, the Trainer and accelerate expect, and `pretrained` reads such a model onto a mesh. `dshard.parallel` has the
names for users, and registers what `parallelize` calls.
"""
