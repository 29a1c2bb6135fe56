/* The event counter of native/common/futex.hpp, one atomic access per step: sleepers that look for what wakers make, and the
 * kernel's sleep, which compares and falls asleep in one step.
 *
 * A thing that is made stands for a slot that becomes FREE, or READY. A sleeper looks for one between its look at
 * `count` and its sleep, as `Ring` and the queues do. It may wake for no reason (a signal, its time limit), at any
 * point; it comes back then and sleeps again. Nobody is killed: a waker that is loses its wake-up, which the re-check
 * at an interval makes good (kRecheck_ns), and which is not in here, since it would hide every fault.
 *
 * F1: when every waker is through, nobody sleeps on a count that is not the present one.
 * F2: nobody sleeps with something to take, once all is at rest.
 *
 * EXPECTED: `expect` raises the flag before the look, and `advance_if_expected` advances nothing where it is down.
 *
 * Defines: SLEEPERS, WAKERS, EVENTS of each waker, SPURIOUS wake-ups of each sleeper; MUT_* plants a fault. */

#ifndef SLEEPERS
#define SLEEPERS 2
#endif
#ifndef WAKERS
#define WAKERS 2
#endif
#ifndef EVENTS
#define EVENTS 1
#endif
#ifndef SPURIOUS
#define SPURIOUS 1
#endif

bool F1_asleep_on_an_old_count;
bool F2_asleep_with_something_to_take;

byte count, made;
bool waiting;
bool asleep[SLEEPERS];
byte before[SLEEPERS];          /* the count that each sleeps on */
byte through;                   /* wakers that have ended */

inline wake_all() {
  atomic { byte each = 0;
    do
    :: each < SLEEPERS -> asleep[each] = false; each++
    :: else -> break
    od }
}

/* sleep_slice, and the loop around it */
proctype Sleeper(byte me) {
  byte spurious = SPURIOUS;
look:
#ifdef MUT_RAISED_BEFORE_SEEN
  waiting = true;
#endif
  before[me] = count;                                   /* seen */
#if defined EXPECTED && !defined MUT_RAISED_BEFORE_SEEN && !defined MUT_RAISED_AFTER_LOOK
  waiting = true;                                       /* expect */
#endif
  if
  :: atomic { made > 0 -> made--; goto over }           /* try_take */
  :: atomic { made == 0 -> skip }
  fi;
  if
  :: atomic { count != before[me] -> goto look }
  :: atomic { count == before[me] -> skip }
  fi;
#ifndef MUT_FLAG_NOT_RAISED
  waiting = true;
#endif
  atomic {                                              /* FUTEX_WAIT */
    if
    :: count != before[me] -> goto look
    :: else -> asleep[me] = true; printf("sleeper %d sleeps on %d\n", me, before[me])
    fi
  }
  if
  :: atomic { !asleep[me] -> goto look }
  :: atomic { asleep[me] && spurious > 0 -> spurious--; asleep[me] = false; printf("sleeper %d wakes by itself\n", me);
       goto look }
  /* At rest: nothing will come any more. */
  :: atomic { asleep[me] && through == WAKERS ->
       assert(before[me] == count || F1_asleep_on_an_old_count);
       assert(made == 0 || F2_asleep_with_something_to_take); goto over }
  fi;
over: skip
}

/* advance, after something was made */
proctype Waker(byte me) {
  byte left = EVENTS;
  bool raised;
again:
  atomic { made++; printf("waker %d has made something\n", me) }
  raised = false;
#ifdef EXPECTED
  if
  :: atomic { !waiting -> goto told }
  :: atomic { waiting -> skip }
  fi;
#endif
#ifdef MUT_LOWERED_AFTER_ADVANCING
  count++;                                              /* as it stood before */
  raised = waiting;
  if
  :: raised -> atomic { raised = waiting; waiting = false; printf("waker %d lowers the flag\n", me) }
  :: else
  fi;
#else
  raised = waiting;
  if
  :: raised -> atomic { raised = waiting; waiting = false; printf("waker %d lowers the flag\n", me) }
  :: else
  fi;
  atomic { count++; printf("waker %d advances to %d\n", me, count) }
#ifndef MUT_NOT_LOOKED_AT_AGAIN
  if
  :: !raised -> raised = waiting
  :: else
  fi;
#endif
#endif
  if
  :: raised -> wake_all()
  :: else
  fi;
told:
  left--;
  if
  :: left > 0 -> goto again
  :: else
  fi;
  atomic { through++; printf("waker %d is through\n", me) }
}

init {
  byte each;
  atomic {
    for (each : 0 .. SLEEPERS - 1) { run Sleeper(each) }
    for (each : 0 .. WAKERS - 1) { run Waker(each) }
  }
}
