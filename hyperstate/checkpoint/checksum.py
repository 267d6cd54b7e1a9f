"""CRC-32, the one of zlib and gzip; by Intel's ISA-L where the package isal is installed, some eight times faster."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
