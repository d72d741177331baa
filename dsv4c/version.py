"""The version of dsv4c; the packaging reads it from here."""

VERSION = "0.1.0"
