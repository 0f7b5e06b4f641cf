"""Tests of the code's numbers and layers, the documents, the installer."""
