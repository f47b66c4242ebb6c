// Command bench compares sandboxer with other ways to the same end: gVisor's own
// command line and a Docker engine. Everything is taken in one run, every engine once
// per round and in a new order each round, so that whatever else the machine does hits
// all of them alike. What counts are the ratios.
//
// With -before it also measures the programs of an older build, by turns with these.
//
// It talks to a real `sandboxer serve` process through the Go client over its Unix
// socket, in a data directory of its own, and removes what it made also when it is
// interrupted. A missed bar is reported and is no failure. A part that fails is reported,
// the others go on, and the exit code is 1.
//
// It is a module of its own: builds and tests of sandboxer leave it out. It runs in the directory of either module, where
// it finds the source of the benchmarks that it compiles.
//
//	go -C bench build -o ../bin/bench .
//	bin/bench -bin bin            # the whole, about ten minutes
//	bin/bench -bin bin -quick     # five rounds without the slow parts
//	bin/bench -bin bin -builds -before ../older/bin
//
// What is not on the machine is left out, with the reason: a static busybox (for the
// image and the other engines), root (for gVisor's command line), a Docker engine
// (found by the docker command, so by DOCKER_HOST).
package main
