"""Tests of the layers of the package, the documents, the installer."""
