package composessh

// A point is a step in the life of a sandbox that involves a host. The connection to the host
// may be cut before it, during it and after it.
type point string

const (
	pDirectory point = "create.directory"  // the lock, meta.json, subnets
	pCopy      point = "create.copy"       // the workspace
	pMounts    point = "create.mounts"     // the compose file and what it mounts
	pBuild     point = "create.build"      // images
	pFill      point = "create.fill"       // what a checkpoint holds
	pAgent     point = "create.agent"      // the agent's program
	pCarry     point = "create.carry"      // the program that filters
	pLink      point = "create.link"       // the gateway, and what leads to it
	pUp        point = "create.up"         // networks, volumes, containers
	pMark      point = "create.mark"       // that it is up
	pLook      point = "ready.look"        // one look at the containers
	pProcesses point = "destroy.processes" // what is still at it
	pObjects   point = "destroy.objects"   // containers, networks, volumes, images
	pRemove    point = "destroy.directory" // the directory and its subnets
)

var points = []point{pDirectory, pCopy, pMounts, pBuild, pFill, pAgent, pCarry, pLink, pUp, pMark, pLook, pProcesses, pObjects, pRemove}

// step takes one step. In tests it calls e.fail before and after the step; e.fail may discard the
// step's answer.
func (e *extension) step(p point, f func() error) error {
	if e.fail == nil {
		return f()
	}
	if err := e.fail(p, false); err != nil {
		return err
	}
	err := f()
	if ferr := e.fail(p, true); err == nil {
		err = ferr
	}
	return err
}
