"""Flower's processes on this machine: certificates, a SuperLink, SuperNodes, the demo."""
