"""Results for people: pictures, exports, trackers, the page."""
