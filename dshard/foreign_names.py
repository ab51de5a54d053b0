"""Names of strategies and classes in other libraries, each with the line to write here."""

_ANSWERS = {
    "ddp dp dataparallel distributeddataparallel": 'parallelize(model, mesh, "data", batch)',
    "fsdp fsdp2 fullyshard fullyshardeddataparallel zero zero3": 'parallelize(model, mesh, "fsdp", batch)',
    "zero1 zero2": 'parallelize(model, mesh, "fsdp", batch), as ZeRO-3; no strategy shards the optimiser alone',
    "hsdp hybridshard": 'parallelize(model, mesh, "data x fsdp", batch), on a mesh of two axes',
    "tp tensorparallel": 'parallelize(model, mesh, "megatron", batch)',
    "sp sequenceparallel": 'parallelize(model, mesh, "megatron-sp", batch), or "context" for long sequences',
    "cp contextparallel": 'parallelize(model, mesh, "context", batch), or "ulysses"',
    "ep expertparallel": 'parallelize(model, mesh, "expert", batch)',
    "pp pipelineparallel": "dshard.pipeline.Pipeline(stages, n_microbatches=8), of stages from dshard.pipeline.split",
}
_LINES = {name: line for names, line in _ANSWERS.items() for name in names.split()}


def line_for(name: str) -> str:
    """The line to write here for a name of other libraries, "" if it is none.

    >>> line_for("ZeRO-3"), line_for("FullyShardedDataParallel"), line_for("megatorn")
    ('parallelize(model, mesh, "fsdp", batch)', 'parallelize(model, mesh, "fsdp", batch)', '')
    """
    return _LINES.get("".join(letter for letter in name.lower() if letter.isalnum()), "")
