# SPDX-License-Identifier: Apache-2.0
"""The only code that talks to the kernel: BPF objects, links, rings, maps, capabilities."""
