"""What engines that are servers share: those that Quantmill starts, and those found at a URL."""
