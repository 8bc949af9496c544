"""Laws of methods, projectors, compressors and aggregators, for `fedspan check-method` and the test suite."""
