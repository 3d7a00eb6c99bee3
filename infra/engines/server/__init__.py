"""Common parts of all engines that are server programs: process, requests, merged weights."""
