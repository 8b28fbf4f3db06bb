# SPDX-License-Identifier: Apache-2.0
"""Turns a run folder of `waybill train` into one self-contained HTML page."""
