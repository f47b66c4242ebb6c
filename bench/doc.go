// Command bench measures sandboxer beside other ways to the same end: gVisor's own
// command line and a Docker engine. Everything is taken in one run, every engine once
// per round and in a new order each round, so that whatever else the machine does hits
// all of them alike. What counts are the ratios.
//
// With -before it also measures the programs of an older build, by turns with these.
//
// It talks to a real `sandboxer serve` process through the Go client over its Unix
// socket, in a data directory of its own, and removes what it made also when it is
// interrupted. A missed bar is reported and is no failure; what cannot run is one.
//
//	go run ./bench -bin bin            # the whole, about ten minutes
//	go run ./bench -bin bin -quick     # five rounds without the slow parts
//	go run ./bench -bin bin -builds -before ../older/bin
//
// What is not on the machine is left out, with the reason: a static busybox (for the
// image and the other engines), root (for gVisor's command line), a Docker engine
// (found by the docker command, so by DOCKER_HOST).
package main
