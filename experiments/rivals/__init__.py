"""Siblings of the balanced maps as plain operations: fit on a calibration, quantize and decode at once."""
