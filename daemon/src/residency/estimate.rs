//! How many bytes a stage task will need on its device.
