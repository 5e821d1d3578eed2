# SPDX-License-Identifier: Apache-2.0
"""`--burst-pack documents`: repacking of a step's documents over the data-parallel ranks."""
