"""The conformance kit: one suite that any backend must pass, on real ranks."""

from .kit import Content, Kit
from .pool import Pool, RankFailure

__all__ = ["Content", "Kit", "Pool", "RankFailure"]
