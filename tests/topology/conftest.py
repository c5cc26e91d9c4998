"""Property tests in this folder use the house's Hypothesis profile."""

from tests.hypothesis_profile import use_profile

use_profile()
