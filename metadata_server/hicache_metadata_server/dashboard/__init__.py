"""Files of the status page for a browser; `http.app` serves them."""
