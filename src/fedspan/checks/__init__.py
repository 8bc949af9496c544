"""The laws that methods, projectors, compressors and aggregators keep, for `fedspan check-method` and the test suite."""
