# SPDX-License-Identifier: Apache-2.0
"""Tests on whole machines, emulated: other kernels, a real systemd, the Debian package.

``make vm`` runs them.
"""
