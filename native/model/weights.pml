/* An update of the weights in two phases: a version lands beside the one that is served, and is proven; one record says
 * whether it is loaded, and it is set once; then each receiver stops, loads it and goes on. Versions 1 to UPDATES are
 * tried one after the other; 0 is served at first.
 *
 * Without TOGETHER it is `WeightUpdate`: a manager calls receivers within limits, and each receiver that cannot load the
 * version loads the one before by itself. A load that outlasts its limit goes on, and the manager with other things.
 * With TOGETHER it is `UpdateBarrier`: receivers act on one record in a store, which goes on to say whether what was
 * loaded stays. The first sender may be killed, and begins the next attempt while others are still in the one before: it
 * replaces the record, what was open in it has failed, and which version was loaded last it goes on to say. A receiver
 * that cannot ask the record takes as long as it likes between its load and the answer.
 *
 * Before the last version is begun, receivers are killed between any two steps and start again, loads fail in the middle,
 * anybody refuses the version for any reason, which covers every limit of time, and any step takes as long as it likes.
 *
 * Defines: UPDATES; TOGETHER; MUT_* plants a fault. */

#define RECEIVERS 2
#ifndef UPDATES
#define UPDATES 3
#endif
#define NONE  14
#define MIXED 15
#define ALL   ((1 << RECEIVERS) - 1)
#define BIT   (1 << me)
#define FAULTS (now < UPDATES)

bool C1_loaded_before_all_had_proven;
bool C2_loaded_after_it_was_refused;
bool C3_changed_while_it_serves;
bool C4_stuck;
bool C5_committed_and_refused;

mtype = { nothing, go, no };
mtype = { rests, stages, proven, stopped, loads, loaded, returns, loads_back, dead };

byte now = 0;                   /* the version that was begun last */
byte group[UPDATES + 1];        /* receivers that have to prove a version */
byte landed[UPDATES + 1];       /* those that have proven it */
byte has_loaded[UPDATES + 1];
mtype commit[UPDATES + 1] = nothing;    /* the record: whether it is loaded */
mtype stays[UPDATES + 1] = nothing;     /* TOGETHER: whether it stays loaded */
mtype seen[UPDATES + 1] = nothing;      /* ghosts: what somebody has acted on */
mtype seen_stays[UPDATES + 1] = nothing;

mtype at[RECEIVERS] = rests;
byte mine[RECEIVERS];           /* the version in whose update it is, or was */
byte held[RECEIVERS];           /* the version in the engine */
byte before[RECEIVERS] = NONE;  /* the one before, until the end of the update */
byte serves[RECEIVERS];         /* the bytes of the worker */
byte knows[RECEIVERS];          /* the version that it has proven to serve */
bool generates[RECEIVERS] = true;
bool begun[RECEIVERS];          /* the load that is waited for has begun */
byte late[RECEIVERS] = NONE;    /* a load that nobody waits for */
byte late_next[RECEIVERS] = NONE;       /* one that has not begun, behind it */

#ifdef MUT_RECORD_SET_AGAIN
#define propose(record, value) record = value
#else
#define propose(record, value) if :: record == nothing -> record = value :: else fi
#endif

inline act(ghost, record) {     /* everybody acts on the same value */
  assert(ghost == nothing || ghost == record || C5_committed_and_refused);
  ghost = record
}

inline begin_load(version) {
  assert(!generates[me] || C3_changed_while_it_serves);
  assert(version == 0 || commit[version] == go || C2_loaded_after_it_was_refused);
  assert(version == 0 || (landed[version] & group[version]) == group[version] || C1_loaded_before_all_had_proven);
  serves[me] = MIXED
}

inline end_load(version) {
  assert(!generates[me] || C3_changed_while_it_serves);
  serves[me] = version
}

inline drop() { held[me] = before[me]; before[me] = NONE }      /* the version that landed is not served */

inline resume(version) {
  assert(serves[me] == version || C3_changed_while_it_serves);
  knows[me] = version; before[me] = NONE; generates[me] = true; at[me] = rests;
  printf("%d generates with version %d\n", me, version)
}

#ifdef MUT_LOADS_SIDE_BY_SIDE
#define FREE true
#else
#define FREE (late[me] == NONE)
#endif

/* The manager does not wait for this load any more. */
inline give_up(version) {
  if :: begun[me] -> late[me] = version :: else -> late_next[me] = version fi;
  printf("%d: the load of version %d is late\n", me, version)
}

proctype Receiver(byte me) {
end:
  do
  :: d_step { at[me] == rests && mine[me] < now && commit[now] == nothing && (group[now] & BIT) ->
       mine[me] = now; at[me] = stages }
  :: d_step { at[me] == stages -> before[me] = held[me]; held[me] = mine[me]; landed[mine[me]] = landed[mine[me]] | BIT;
       at[me] = proven; printf("%d has proven version %d\n", me, mine[me]) }
  :: d_step { (at[me] == stages || at[me] == proven) && mine[me] < UPDATES -> propose(commit[mine[me]], no) }
  :: d_step { at[me] == stages && commit[mine[me]] == no -> act(seen[mine[me]], no); at[me] = rests }
  :: d_step { at[me] == proven && commit[mine[me]] == no -> act(seen[mine[me]], no); at[me] = rests;
#ifndef MUT_REFUSED_IS_KEPT
       drop();
#endif
       printf("%d: version %d is refused\n", me, mine[me]) }
  :: d_step { at[me] == proven && commit[mine[me]] == go -> act(seen[mine[me]], go); generates[me] = false; at[me] = stopped }
  :: d_step { at[me] == stopped -> at[me] = loads; begun[me] = false; late_next[me] = NONE; knows[me] = NONE }
  :: d_step { at[me] == loads && !begun[me] && FREE -> begun[me] = true; begin_load(held[me]) }
  :: d_step { at[me] == loads && begun[me] -> end_load(held[me]); at[me] = loaded;
       has_loaded[mine[me]] = has_loaded[mine[me]] | BIT; printf("%d has loaded version %d\n", me, held[me]) }
  :: d_step { at[me] == loads && begun[me] && FAULTS -> at[me] = returns; printf("%d fails to load\n", me);
#ifdef TOGETHER
       propose(stays[mine[me]], no);
#endif
       skip }
#ifdef TOGETHER
  :: d_step { at[me] == loaded && stays[mine[me]] == go -> act(seen_stays[mine[me]], go); resume(mine[me]) }
  :: d_step { at[me] == loaded && stays[mine[me]] == no -> at[me] = returns }
#ifdef MUT_KEPT_IS_FORGOTTEN
  :: d_step { at[me] == loaded && mine[me] < now -> at[me] = returns }
#endif
#ifdef MUT_RETURNS_ALONE
  :: d_step { at[me] == loaded && mine[me] < UPDATES -> at[me] = returns }
#else
  :: d_step { at[me] == loaded && mine[me] < UPDATES -> propose(stays[mine[me]], no) }
#endif
  :: d_step { at[me] == returns -> act(seen_stays[mine[me]], no); drop();
       if :: held[me] == NONE -> at[me] = rests :: else -> at[me] = loads_back; begun[me] = false fi }
#else
  :: d_step { at[me] == stopped && FAULTS -> drop();     /* it did not stop in time: nothing is loaded */
       if :: knows[me] != NONE -> resume(knows[me]) :: else -> at[me] = rests fi }
  :: d_step { at[me] == loads && FAULTS -> give_up(held[me]); drop(); at[me] = rests }
  :: d_step { at[me] == loaded -> resume(mine[me]) }
  :: d_step { at[me] == returns ->
       drop(); if :: held[me] == NONE -> at[me] = rests :: else -> at[me] = loads_back; begun[me] = false fi }
  :: d_step { at[me] == loads_back && FAULTS -> give_up(held[me]); at[me] = rests }
#endif
  :: d_step { at[me] == loads_back && !begun[me] && FREE -> begun[me] = true; begin_load(held[me]) }
  :: d_step { at[me] == loads_back && begun[me] -> end_load(held[me]); resume(held[me]) }
  :: d_step { at[me] == loads_back && begun[me] && FAULTS -> at[me] = rests }      /* it serves nothing */
  :: d_step { late[me] != NONE -> end_load(late[me]); late[me] = NONE; printf("%d: a late load ends\n", me) }
  :: d_step { late[me] != NONE && FAULTS -> late[me] = NONE; printf("%d: a late load fails\n", me) }
  :: d_step { late_next[me] != NONE && late[me] == NONE && at[me] != loads && at[me] != loads_back ->
       begin_load(late_next[me]); late[me] = late_next[me]; late_next[me] = NONE }
  :: d_step { at[me] != dead && FAULTS -> printf("%d is killed\n", me);
       at[me] = dead; generates[me] = false; serves[me] = NONE; held[me] = NONE; before[me] = NONE; knows[me] = NONE;
       late[me] = NONE; late_next[me] = NONE }
  :: d_step { at[me] == dead -> at[me] = rests }     /* starts again, without a version */
  od
}

#define NOBODY_IN(version) ((at[0] == rests || at[0] == dead || mine[0] != version) && \
                            (at[1] == rests || at[1] == dead || mine[1] != version))

/* The manager, or the first sender. */
proctype Leader() {
end:
  do
#ifdef TOGETHER
  :: d_step { now < UPDATES ->  /* also one that was killed */
       if :: now > 0 -> propose(commit[now], no); propose(stays[now], no) :: else fi;
       now++; group[now] = ALL; printf("version %d\n", now) }
  :: d_step { now > 0 && stays[now] == nothing && has_loaded[now] == ALL -> stays[now] = go }
  :: d_step { now > 0 && now < UPDATES && commit[now] == go -> propose(stays[now], no) }
#else
  :: d_step { now < UPDATES && (now == 0 || commit[now] == no || (commit[now] == go && NOBODY_IN(now))) &&
       (at[0] != dead || at[1] != dead) && (now < UPDATES - 1 || (at[0] != dead && at[1] != dead)) ->
       now++; group[now] = (at[0] != dead) + 2 * (at[1] != dead); printf("version %d\n", now) }
#endif
#ifdef MUT_COMMITS_BEFORE_ALL_HAVE_PROVEN
  :: d_step { now > 0 && commit[now] == nothing && landed[now] -> commit[now] = go }
#else
  :: d_step { now > 0 && commit[now] == nothing && (landed[now] & group[now]) == group[now] -> commit[now] = go }
#endif
  :: d_step { now > 0 && now < UPDATES -> propose(commit[now], no) }
  od
}

init {
  byte me;
  atomic {
    run Receiver(0); run Receiver(1);
    run Leader()
  }
  timeout;
  /* the last version, in whose update nothing failed, is served by all, whatever happened before */
  for (me : 0 .. RECEIVERS - 1) {
    assert((at[me] == rests && generates[me] && serves[me] == UPDATES && late[me] == NONE) || C4_stuck)
  }
  assert((now == UPDATES && commit[now] == go) || C4_stuck)
}
