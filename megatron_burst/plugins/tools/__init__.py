# SPDX-License-Identifier: Apache-2.0
"""Commands beside training: advise, memory, show, trace, calibrate, and the GPU report."""
