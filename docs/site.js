// A browser runs no search worker for pages that are opened from the disk: `make site-serve` serves them.
if (location.protocol === "file:") document.documentElement.classList.add("from-disk");
