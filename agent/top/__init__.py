# SPDX-License-Identifier: Apache-2.0
"""``profinferd top``: what engines do, live, on a terminal."""
