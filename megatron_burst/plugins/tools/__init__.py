# SPDX-License-Identifier: Apache-2.0
"""Commands for use outside training: advise, memory, show, trace, calibrate, and the GPU report."""
