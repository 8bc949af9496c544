"""The laws that methods, projectors and compressors keep, for `fedspan check-method` and the test suite."""
