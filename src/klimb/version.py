"""The version, where setuptools reads it too."""

VERSION = "0.1.0"
