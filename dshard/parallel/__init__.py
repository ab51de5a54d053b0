"""Lay out whole models: the search over meshes."""

from dshard.parallel.search import MeshChoice, Move, Transformer, rank_meshes

__all__ = ["MeshChoice", "Move", "Transformer", "rank_meshes"]
