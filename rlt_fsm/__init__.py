"""From spec files to tables, classes, traces and pictures; knows no device, network or solver."""
