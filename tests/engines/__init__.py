# SPDX-License-Identifier: Apache-2.0
"""Tests against real, stock engines. Nothing here is imported by the product."""
