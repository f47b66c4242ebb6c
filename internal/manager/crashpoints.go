package manager

// A point is a place where the process may die in the crash tests: just before or
// just after a commit or an effect outside.
type point string

// The points, in the order of a life. A step without its points here does not
// compile; a point without a crash case fails the tests.
const (
	pRecord        point = "create.record"     // commit: hold, record, idempotency key, and where it is to be made
	pProvision     point = "create.provision"  // effect
	pLeaveHost     point = "create.vacate"     // effect: the teardown where it could not be made
	pPlaced        point = "create.placed"     // commit: where else, or where after all, it is to be made
	pUntouched     point = "create.untouched"  // commit: nothing was made there
	pHandle        point = "create.handle"     // commit
	pReady         point = "create.ready"      // effect
	pAnswer        point = "create.answer"     // effect: the profile's ready check is asked
	pRunning       point = "create.running"    // commit
	pMetered       point = "meter.metered"     // commit: what the meter said, more hold
	pEnding        point = "destroy.ending"    // commit: the intent
	pTeardown      point = "destroy.teardown"  // effect
	pReading       point = "destroy.reading"   // commit: what the meter said before
	pEnded         point = "destroy.ended"     // commit: post, void; or a pending bill
	pSettled       point = "destroy.settled"   // commit: post, void of a pending bill
	pSent          point = "sink.sent"         // effect: a sink gets usage rows
	pTaken         point = "sink.taken"        // commit: which it took, or refused
	pRenew         point = "extend.renew"      // effect
	pExtended      point = "extend.extended"   // commit: hold, expiry
	pNetworkRecord point = "network.rewired"   // commit: the policy
	pNetworkSet    point = "network.rewire"    // effect
	pSaving        point = "snapshot.record"   // commit: saving
	pSave          point = "snapshot.save"     // effect: the extension's own form
	pArchive       point = "snapshot.archive"  // effect: the portable form
	pSealed        point = "snapshot.sealed"   // commit
	pDropping      point = "drop.record"       // commit: dropping
	pDrop          point = "drop.drop"         // effect: the extension's own form
	pDelete        point = "drop.delete"       // effect: the portable form
	pDropped       point = "drop.dropped"      // commit
	pRestore       point = "restore.restore"   // effect, in the place of create.provision
	pUnarchive     point = "restore.unarchive" // effect, after create.ready
	pRestoreFrom   point = "restore.from"      // effect, in the place of create.provision: the portable form
	pPausing       point = "pause.pausing"     // commit: the intent, and the record of its snapshot
	pFuse          point = "pause.fuse"        // effect
	pFreeze        point = "pause.freeze"      // effect
	pPaused        point = "pause.paused"      // commit
	pResuming      point = "resume.resuming"   // commit: the intent, the next generation, more hold
	pUnfreeze      point = "resume.thaw"       // effect
	pResumeFailed  point = "resume.relapsed"   // commit: it failed
	pPoolRecord    point = "pool.record"       // commit: one for the pool
	pWarm          point = "pool.warm"         // commit
	pClaimed       point = "claim.claimed"     // commit: its owner, hold, idempotency key
	pClaim         point = "claim.claim"       // effect
	pDiscard       point = "claim.discard"     // effect: the teardown of one that could not be claimed
	pReplaced      point = "claim.replaced"    // commit: the next generation
	pRetry         point = "retry"             // commit: a step failed and is to be repeated
	pOrphan        point = "sweep.orphan"      // effect
	pLeft          point = "burst.left"        // commit: the next candidate and generation, and what may exist at the last one
	pDebt          point = "debt.teardown"     // effect
	pDebtPaid      point = "debt.paid"         // commit: it is gone, or is to be tried again
)

var points = []point{
	pRecord, pProvision, pLeaveHost, pPlaced, pUntouched, pHandle, pReady, pAnswer, pRunning,
	pMetered, pEnding, pReading, pTeardown, pEnded, pSettled, pSent, pTaken,
	pRenew, pExtended,
	pNetworkRecord, pNetworkSet,
	pSaving, pSave, pArchive, pSealed, pDropping, pDrop, pDelete, pDropped,
	pRestore, pUnarchive, pRestoreFrom,
	pPausing, pFuse, pFreeze, pPaused, pResuming, pUnfreeze, pResumeFailed,
	pPoolRecord, pWarm, pClaimed, pClaim, pDiscard, pReplaced,
	pRetry, pOrphan,
	pLeft, pDebt, pDebtPaid,
}

// step runs one commit or effect between its two points.
func (m *Manager) step(p point, f func() error) error {
	m.opts.fail(p + ".before")
	err := f()
	m.opts.fail(p + ".after")
	return err
}
