package extensiontest

// Wire names the behaviours that RunWire runs.
var Wire = wire
