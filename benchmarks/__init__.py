"""Load tools and measurements behind `isthmus bench`; smoke-run by the tests."""
